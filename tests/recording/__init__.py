"""Records `shmbuffer top` beside the demo: the kill, the restart and the recovery.

    tmux ──▶ shmbuffer demo   ┐
         ──▶ shmbuffer top    ┴─ captured five times a second ──▶ frames ─┬▶ the six that tell it
                                                                          └▶ a film of them

`scripts/record-top` writes docs/images/demo.svg, which is the film, docs/images/top-*.svg and
docs/recordings/top.txt.
"""
