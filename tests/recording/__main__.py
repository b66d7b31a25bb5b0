"""The command line of the recording; see `scripts/record-top`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.recording import animation, recorder, rendering, terminal
from tests.recording.frames import Story, plain, trimmed

_FILM = "shmbuffer top beside the demo: a collector is killed, then all, and training goes on"
_STILL = 1  # the scene of the kill
_STILL_OF_TOP = 2  # all four collectors are there again
_DOCS = Path(__file__).parents[2] / "docs"


def main() -> int:
    """Records the demo and writes the pictures and the text."""
    parser = argparse.ArgumentParser(prog="scripts/record-top", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the demo (default 0)")
    parser.add_argument(
        "--docs", type=Path, default=_DOCS, help="where images/ and recordings/ are (default docs)"
    )
    args = parser.parse_args()
    if not terminal.is_installed():
        print("tmux is not installed (Debian, Ubuntu: apt install tmux)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="shmbuffer-recording-") as folder:
        story = Story(recorder.frames(Path(folder), seed=args.seed, max_minutes=10))
        if not story.missing:
            recorder.plot(Path(folder), args.docs / "images" / "plot.png")
    if story.missing:
        print(f"no frame shows this: {'; '.join(story.missing)}", file=sys.stderr)
        return 1
    write(story, args.docs)
    return 0


def write(story: Story, docs: Path) -> None:
    """Writes the scenes as pictures and as one text, and the whole story as a film."""
    for folder in ("images", "recordings"):
        (docs / folder).mkdir(parents=True, exist_ok=True)
    texts = []
    for scene in story.scenes:
        drawn = rendering.svg(scene.frame, scene.title, recorder.WIDTH, scene.name)
        (docs / "images" / f"top-{scene.name}.svg").write_text(drawn)
        shown = (scene.frame.told, trimmed(scene.frame.top))
        panes = (plain("\n".join(lines)) for lines in shown)
        texts.append(f"\n\n== {scene.frame.at_s:.1f} s: {scene.title}\n\n" + "\n\n".join(panes))
    still = story.scenes[_STILL_OF_TOP]
    alone = rendering.svg_of_top(still.frame, recorder.WIDTH, "still")
    (docs / "images" / "top.svg").write_text(alone)
    shots = story.shots()
    still = next(at for at, shot in enumerate(shots) if shot.title == story.scenes[_STILL].title)
    film = animation.svg(shots, width=recorder.WIDTH, title=_FILM, still=still)
    (docs / "images" / "demo.svg").write_text(film)
    head = "shmbuffer demo, and shmbuffer top beside it, as scripts/record-top saw them in tmux."
    (docs / "recordings" / "top.txt").write_text(head + "".join(texts) + "\n")


if __name__ == "__main__":
    sys.exit(main())
