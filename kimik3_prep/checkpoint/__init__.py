"""What the checkpoint's preprocessor config says: its settings, the patch grid of a size, the values of the levels."""
