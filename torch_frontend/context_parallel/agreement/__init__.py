"""How ranks compare their calls, through the store of torch.distributed, and hear if one of them refuses a call."""
