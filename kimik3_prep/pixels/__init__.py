"""Decoded images to patches of pixel features, by the processor or by a device, with the same bytes."""
