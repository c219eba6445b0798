"""Encoded images: where their bytes come from, and how they become decoded pictures, safely."""
