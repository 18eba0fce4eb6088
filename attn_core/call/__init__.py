"""A call as plain data: its spec, masks, options, packed documents, pages and tensors."""
