"""The picture of a result that `octet report --share` writes."""

import os
from xml.etree import ElementTree

import trainer
from tests.conftest import octet, program, said_by
from tests.reports.conftest import configure
from tests.ui.browser import found
from trainer.reports import convert_svg
from trainer.run_folder.reader import read_run


def texts_of(folder) -> tuple[ElementTree.Element, list[str]]:
    drawn = ElementTree.parse(folder / "share.svg").getroot()
    return drawn, [one.text or "" for one in drawn.iter() if one.tag.endswith("}text")]


def test_the_picture_has_the_result_the_verdict_and_a_curve(copied, monkeypatch):
    monkeypatch.setenv("PATH", "")  # no browser makes a PNG of it
    folder = copied("demo")
    assert octet("report", "--share", folder) == 0
    run, (drawn, texts) = read_run(folder), texts_of(folder)
    assert drawn.attrib["viewBox"] == "0 0 1200 630"
    base, trained = (one["accuracy"] for one in run.evaluation["evaluations"][:2])
    assert f"{base:.1%} → {trained:.1%}" in texts
    assert f"{run.verdict.kind}: {run.verdict.evidence}".startswith(texts[2])
    assert f"{run.steps} steps of GRPO with octet {trainer.__version__}" in texts
    assert texts[0] == "Octet's embedded model on word problems"
    assert "accuracy" in texts
    assert any(one.tag.endswith("}polyline") for one in drawn.iter())


def test_without_evaluations_the_verdict_stands_in_their_place(copied, monkeypatch):
    monkeypatch.setenv("PATH", "")
    folder = copied("demo")
    (folder / "eval.json").unlink()
    configure(folder, warmup__only=True, warmup__steps=6)
    assert octet("report", "--share", folder) == 0
    assert read_run(folder).verdict.kind in texts_of(folder)[1]
    assert f"6 steps of supervised training with octet {trainer.__version__}" in texts_of(folder)[1]


def test_a_png_is_written_if_something_can_convert_it(copied, tmp_path, capsys, monkeypatch):
    folder = copied("demo")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert "pip install cairosvg" in said_by(capsys, "report", "--share", folder)[2]
    program(tmp_path / "bin/rsvg-convert", '#!/bin/sh\necho "PNG $@"; /bin/cat\n')
    assert said_by(capsys, "report", "--share", folder)[1] == f"{folder}/share.svg\n{folder}/share.png\n"
    assert (folder / "share.png").read_bytes() == b"PNG -f png\n" + (folder / "share.svg").read_bytes()


def test_a_browser_that_hangs_makes_no_png(copied, tmp_path, capsys, monkeypatch):
    folder = copied("demo")
    program(tmp_path / "bin/chromium", "#!/bin/sh\nexec /bin/sleep 600\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(convert_svg, "BROWSER_S", 0.1)
    assert "pip install cairosvg" in said_by(capsys, "report", "--share", folder)[2]


def test_a_browser_makes_the_png_where_no_converter_does(copied, tmp_path, capsys, monkeypatch):
    from PIL import Image

    browser, folder = found(), copied("demo")
    program(tmp_path / "bin/chromium", f'#!/bin/sh\nPATH={os.environ["PATH"]}\nexec "{browser}" "$@"\n')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert said_by(capsys, "report", "--share", folder)[1] == f"{folder}/share.svg\n{folder}/share.png\n"
    with Image.open(folder / "share.png") as picture:
        assert picture.size == (1200, 630)
        assert picture.convert("RGB").getpixel((5, 5)) == (255, 255, 255)
        assert len(picture.convert("RGB").getcolors(2**20)) > 50
