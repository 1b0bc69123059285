"""Make the picture of a report in the README: `python benchmarks/report_picture.py RUN docs/images/report.png`.

Needs Chromium and Pillow. Shows the top of the page, the loss and the expert load; colors are reduced to a palette.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from spurline.tools.report import write_report

WIDTH, HEIGHT, COLORS = 1200, 980, 128
HIDDEN = ".charts figure:not([data-chart=loss]), .samples { display: none } .tools { margin-top: 20px !important }"


def main(run: str, picture: str) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))))
    with tempfile.TemporaryDirectory() as folder:
        page = write_report([run], f"{folder}/report.html")
        page.write_text(page.read_text().replace("</style>", f"{HIDDEN}</style>", 1))
        shot = Path(folder) / "shot.png"
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
        ]
        how = [f"--window-size={WIDTH},{HEIGHT}", "--virtual-time-budget=4000", f"--screenshot={shot}"]
        subprocess.run([browser, *options, *how, page.as_uri()], check=True, capture_output=True)
        image = Image.open(shot).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
        image.save(picture, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
