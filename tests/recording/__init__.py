"""`shmbuffer top` on the demo, recorded: the kill, the restart and the recovery as they happen.

    tmux ──▶ shmbuffer demo   ┐
         ──▶ shmbuffer top    ┴─ captured five times a second ──▶ frames ──▶ the six that tell it

`scripts/record-top` makes docs/recordings/top.txt and docs/images/top-*.svg of them.
"""
