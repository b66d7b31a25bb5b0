"""Sample units, which expand a drawn item into a window, a transition or a stack of frames."""
