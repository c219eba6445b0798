"""A finished run read back: for training, for serving engines, for proof, and as pictures."""
