"""The commands of docs/clusters.md, with stand-ins for those of the schedulers."""

import re
import shlex
from pathlib import Path

import pytest

from spurline.cli import main
from spurline.tools import launch

PAGE = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
BLOCKS = re.findall(r"^<!-- run by tests/launch/test_clusters_page.py -->\n```bash\n(.*?)^```$", PAGE, re.M | re.S)


@pytest.mark.parametrize("block", BLOCKS, ids=["start", "slurm", "kubernetes"])
def test_commands_write_the_files_that_are_submitted(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr(launch, "run", lambda options, command, train: started.append(options.ranks) or 0)
    for line in block.replace("\\\n", " ").splitlines():
        program, *words = shlex.split(line)
        if program == "spurline":
            assert main(words) == 0, capsys.readouterr().err
        else:
            assert program in ("sbatch", "kubectl")
            assert (tmp_path / words[-1]).is_file(), line
    made = sorted(path.suffix for path in tmp_path.iterdir())
    expected = {"start": ([".sh"], [4]), "slurm": ([".sbatch"], []), "kubernetes": ([".yaml"], [])}
    assert (made, started) in expected.values()
