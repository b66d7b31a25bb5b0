"""`shmbuffer top` on the demo, recorded: the kill, the restart and the recovery as they happen.

    tmux ──▶ shmbuffer demo   ┐
         ──▶ shmbuffer top    ┴─ captured five times a second ──▶ frames ─┬▶ the six that tell it
                                                                          └▶ a film of them

`scripts/record-top` makes docs/images/demo.svg, the film, docs/images/top-*.svg and
docs/recordings/top.txt of them.
"""
