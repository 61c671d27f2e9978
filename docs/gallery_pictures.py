"""Draw the pictures of the gallery: ``python docs/gallery_pictures.py [NAME ...]`` runs examples, a minute or two each.

With ``--from FOLDER`` nothing runs: the pictures are those in FOLDER/NAME/results.png, such as ``out``. Pictures get a palette and a
width of 1,200 pixels, so that each is smaller than 60 kB.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

from PIL import Image

ROOT = pathlib.Path(__file__).parents[1]
GALLERY = ROOT / "docs" / "images" / "gallery"
NAMES = [path.stem for path in sorted((ROOT / "examples").glob("[!_]*.py")) if path.stem != "train_multihost"]


def shrink(source, target, width=1200, colors=40):
    """Write a smaller picture with a palette."""
    picture = Image.open(source).convert("RGB")
    picture = picture.resize((width, round(width * picture.height / picture.width)), Image.Resampling.LANCZOS)
    picture.quantize(colors, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(target, optimize=True)
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size / 1000:.0f} kB")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, help="of examples (default: all that draw a picture)")
    parser.add_argument("--from", dest="folder", type=pathlib.Path, help="where results of earlier runs are")
    options = parser.parse_args()
    for name in options.names:
        if options.folder:
            shrink(options.folder / name / "results.png", GALLERY / f"{name}.png")
            continue
        with tempfile.TemporaryDirectory() as folder:
            script = ROOT / "examples" / f"{name}.py"
            subprocess.run([sys.executable, script, "--out", folder], check=True)
            shrink(pathlib.Path(folder) / "results.png", GALLERY / f"{name}.png")


if __name__ == "__main__":
    main()
