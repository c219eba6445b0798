"""Any source of images to items: which rows there are, which images they name, what is wrong with them."""
