"""Kept values that leave the device, and come back when backward asks for them."""
