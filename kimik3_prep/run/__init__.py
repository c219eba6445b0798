"""A run: everything from options to a finished output folder, on this machine's workers or on a cluster."""
