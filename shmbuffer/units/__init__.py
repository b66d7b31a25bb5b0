"""Sample units, which expand each drawn item into a window, a transition or a frame stack."""
