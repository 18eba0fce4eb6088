"""Programs for the people who maintain the project. The Makefile runs them; the packages do not use them."""
