"""Sample units, which turn a drawn item into a window, a transition or a stack of frames."""
