"""The screen of `top`: one look after the other, as tables or on a terminal, and its keys."""
