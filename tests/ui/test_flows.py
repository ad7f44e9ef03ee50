"""Evenings on the page, in a real browser: a messy table, stop and resume, a page that is closed, hostile text."""

import os
import signal
import sys
from itertools import product

import pytest

from tests.conftest import launch, lines_of, until, write_lines
from tests.reports.conftest import HOSTILE
from tests.ui.conftest import serving

pytestmark = pytest.mark.slow
SHORT = {"--preset": "nano", "task.name": "nano", "more": "eval.problems=32 run.merge=false rollout.problems=4"}


@pytest.fixture(scope="module")
def short(folder):
    """A short run that a terminal has started."""
    words = ["--preset", "nano", "run.steps=3", "eval.problems=32", "run.merge=false", "run.dir=runs/terminal"]
    launch(sys.executable, "-m", "octet", "train", *words, folder=folder, check=True)
    return folder / "runs/terminal"


def messy(path):
    """Write a table with semicolons, other names of columns, an empty row, and answers that are none."""
    rows = ["Frage;Antwort", "What is missing?;", "Who buys plums?;n/a"]
    for bags, each, given, who in product(range(2, 8), range(2, 8), range(1, 4), ("Ann", "Ben")):
        question = f"{who} buys {bags} bags of {each} plums and gives {given} away. How many plums are left?"
        rows.append(f"{question};{bags * each - given}")
    path.write_text("\n".join(rows), encoding="utf-16")
    return path


def test_from_a_messy_table_to_a_trained_model_its_verdict_and_a_chat(browser, address, folder, tmp_path):
    page = browser.open(address)
    page.drop(messy(tmp_path / "plums.csv"))
    page.until("#sheet", "there is no column")
    assert page.js("location.pathname") in address  # a browser opens a file that the page does not take
    page.write(**{"task.question": "Frage", "task.answer": "Antwort", "prompt.style": "chat"})
    page.click("[data-do=look]")
    page.until("#sheet", "`Antwort` is empty")
    assert "runs/uploads/plums.csv is not UTF-8; it was read as UTF-16" in page.text("#sheet")
    page.js("sheet.textContent = ''")
    page.drop(tmp_path / "plums.csv")
    page.until("#sheet", "`Antwort` is empty")
    page.js("[...document.querySelectorAll('#sheet button')].find(one => one.innerText == 'Leave them out').click()")
    page.click("[data-do=look]")
    page.until("#sheet", "What the model will see")
    assert "n/a" in page.text("#sheet")
    page.write(**{"run.steps": "30", "name": "plums"})
    page.write(more="task.on_bad_record=skip task.holdout=0.3 run.merge=false")
    page.until("#train .row pre", "task.holdout=0.3")
    page.start()
    page.until("#outcome", "learned:", 300)
    page.write(asked="Ann buys 3 bags of 4 plums and gives 2 away. How many plums are left?")
    page.click("[data-do=ask]")
    page.until("#chat", "adapter")
    assert page.text("#chat").count("read:") == 2
    page.click("[data-do=share]")
    until(lambda: page.js("document.querySelector('#made img')?.naturalWidth > 0"), say=lambda: page.text("#made"))
    page.write(**{"--to": "safetensors"})
    page.click("[data-do=export]")
    page.until("#made", "written to runs/plums/export-safetensors")
    assert (folder / "runs/plums/export-safetensors/model.safetensors").is_file()
    assert page.complaints() == []
    page.close()


def test_a_run_is_stopped_resumed_and_goes_on_without_page_and_server(browser, tmp_path):
    settings = SHORT | {"run.steps": "150", "name": "long"}
    with serving(tmp_path) as address:
        page, other = browser.open(address), browser.open(address)
        page.write(**settings)
        page.until("#train .row pre", "run.steps=150")
        page.start()
        page.until("#live", "left, last step at")
        until(lambda: other.js("document.querySelector('[data-pick=long]') !== null"))
        other.click("[data-pick=long]")
        other.until("#live", "left, last step at")
        page.click("[data-do=stop]")
        page.until("#live", "stopped after step")
        other.until("#live", "stopped after step")
        stopped = len(lines_of(tmp_path / "runs/long/metrics.jsonl"))
        other.start("resume")
        until(lambda: len(lines_of(tmp_path / "runs/long/metrics.jsonl")) > stopped + 1)
        other.close()
        page.click("[data-do=train]")
        page.until("#said", "there is a run of this name")
        page.close()
    until((tmp_path / "runs/long/verdict.json").is_file, 200)
    assert "runs/long" in (tmp_path / "runs/long.log").read_text()
    with serving(tmp_path) as address:
        page = browser.open(f"{address}?run=long")
        page.until("#live", "Step 150 of 150, ended")
        page.close()


def test_a_killed_run_and_one_that_cannot_start_are_shown_as_what_they_are(browser, tmp_path):
    with serving(tmp_path) as address:
        page = browser.open(address)
        never_saved = f"{SHORT['more']} run.save_every=9999"  # and long enough to be seen on a busy machine
        page.write(**SHORT | {"run.steps": "9999", "name": "killed", "more": never_saved})
        page.until("#train .row pre", "killed")
        page.start()
        page.until("#live", "left, last step at")
        os.kill(int(page.text("#live .row pre").split()[-1]), signal.SIGKILL)
        page.until("#live", "stopped after step")
        page.until("#live", "was killed (signal 9)")
        page.write(**{"task.name": "records", "task.path": "nowhere.csv", "name": "wrong"})
        page.until("#train .row pre", "wrong")
        page.start()
        page.until("#live", "there is no such file")
        assert page.js("one.hidden")
        page.close()


FOCUSED = "a[href], button, input, select, textarea, summary"
ALL = f"[...document.querySelectorAll('{FOCUSED}')].filter(one => one.checkVisibility())"


def test_by_keyboard_alone(browser, tmp_path):
    with serving(tmp_path) as address:
        page = browser.open(address)
        page.until("#plan", "fit")
        reached = []
        for _ in range(page.js(f"window.there = {ALL}; there.length")):
            page.press("Tab")
            reached.append(page.js("there.indexOf(document.activeElement)"))
            assert page.js("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        assert reached == [*range(len(reached))]
        for name, text in {"task.name": "nano", "run.steps": "9999", "name": "keys"}.items():
            page.tab_to(f"[name='{name}']")
            page.js("document.activeElement.select()")
            for key in text:
                page.press(key)
        page.until("#train .row pre", "task.name=nano run.steps=9999 run.dir=runs/keys")
        page.tab_to("[data-do=train]")
        page.press("Enter")
        until(lambda: page.text("#said"))
        assert page.js("document.activeElement.dataset.do") == "train"
        if "in progress" in page.text("#said"):
            page.tab_to("#said [data-do]")
            page.press("Enter")
        page.until("#live", "left, last step at")
        page.tab_to("#live summary")
        page.press("Enter")
        before = page.text("#live p")
        until(lambda: page.text("#live p") != before)
        assert page.js("document.activeElement.closest('#live details').open")
        page.tab_to("#live [data-do]")
        page.press(" ")
        page.until("#live", "stopped after step")
        page.tab_to("[data-pick=keys]")
        page.press(" ")
        until(lambda: page.text("#live") == "", say=lambda: page.text("#live"))
        page.close()


def test_hostile_answers_are_text_and_a_run_of_a_terminal_is_there(browser, address, short):
    samples = lines_of(short / "samples.jsonl")
    for sample in samples:
        sample |= {"completion": HOSTILE, "prompt": HOSTILE, "gold": HOSTILE}
    write_lines(short / "samples.jsonl", samples)
    page = browser.open(f"{address}?run=terminal")
    page.until("#live", "<script>document.title='taken'</script>")
    page.size(390)
    assert page.js("document.documentElement.scrollWidth") <= 390
    page.click("[data-do=models]")
    page.until("#models", "Qwen")
    assert page.js("document.querySelector('#models button').getBoundingClientRect().right") <= 376  # none is cut off
    assert page.js("document.title") == "Octet"
    assert page.complaints() == []
    page.close()


TAKE = "[...document.querySelectorAll('#models tr')].find(row => row.innerText.includes('{}')).querySelector('button')"


def test_what_is_taken_replaces_what_was_taken_before(browser, address):
    page = browser.open(f"{address}?--preset=8gb&task.name=gsm8k&--card=RTX+4060")
    page.click("[data-do=models]")
    page.until("#models", "Qwen3-1.7B")
    typed = """prompt.system='it'"'"'s' eval.problems=8"""
    page.write(more=typed)
    page.js(f"{TAKE.format('Qwen/Qwen3-8B')}.click()")
    assert "model.quantize=nf4" in page.js("form.elements.more.value")
    page.js(f"{TAKE.format('Qwen/Qwen3-1.7B')}.click()")
    assert page.js("form.elements.more.value") == typed
    page.js("take(['task.on_bad_record=skip']); take(['task.on_bad_record=skip'])")
    assert page.js("form.elements.more.value") == f"{typed} task.on_bad_record=skip"
    page.close()


OVERTAKEN = """
window.whole = fetch;
window.fetch = async (...asked) => {
  const answer = await whole(...asked);
  if (/run=terminal|"late"/.test(asked[0] + asked[1]?.body)) await new Promise(done => setTimeout(done, 500));
  return answer;
};
seen = "";
Promise.all([look(), (runs.clear(), look())]);
"""
COMMANDS = """
form.elements.name.value = "late";
late = commands();
form.elements.name.value = "new";
Promise.all([late, commands(), document.querySelector("[data-do=look]").remove()]);
"""


def test_a_page_shows_what_was_chosen_last_and_says_that_a_new_server_is_another(browser, address, short):
    page = browser.open(f"{address}?run=terminal")
    page.until("#live", "Step 3 of 3")
    page.js(OVERTAKEN)
    assert page.text("#live") == ""
    page.js(COMMANDS)
    assert "run.dir=runs/new" in page.text("#train .row pre")
    page.js("ask('../another-key/live')")
    assert page.js("!lost.hidden")
    page.close()


INTERRUPTED = """
window.whole = fetch;
window.fetch = async (...asked) => {
  const answer = await whole(...asked);
  answer.text = () => Promise.reject(new TypeError("interrupted"));
  return answer;
};
look();
"""


def test_a_page_whose_answer_is_interrupted_says_so_and_asks_again(browser, address):
    page = browser.open(f"{address}?--preset=UNKNOWN&run.steps=7")
    page.until("#plan", "fit")
    page.until("#train .row pre", "octet train --preset nano task.name=nano run.steps=7 run.dir=")
    page.js(INTERRUPTED)
    until(lambda: page.js("!lost.hidden"))
    page.js("window.fetch = whole")
    until(lambda: page.js("lost.hidden"))
    assert page.complaints() == []
    page.close()
