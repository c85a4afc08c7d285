"""The page in a real browser: headless Chromium, driven by its own driver over plain HTTP."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from incvec.study.page import make_sections, render_html
from incvec.study.page_figures import find_study_figures
from incvec.study.runs import load_runs
from tests.study import samples

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NEEDED = "needs Debian's packages chromium and chromium-driver: apt-get install chromium chromium-driver"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=NEEDED)]
HOVER = "cifar100-5-podnet-accuracy"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Browser:
    """The part of WebDriver that these tests need."""

    def __init__(self, port: int, *arguments: str, phone: bool = False) -> None:
        self.root = f"http://127.0.0.1:{port}/session"
        options: dict[str, Any] = {
            "binary": CHROMIUM,
            # No name resolves: a request to any host fails and appears in the log.
            "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                     "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND", *arguments],
        }  # fmt: skip
        if phone:
            options["mobileEmulation"] = {"deviceMetrics": {"width": 400, "height": 800, "pixelRatio": 2}}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        self.root += "/" + self.ask("", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def ask(self, path: str, content: dict[str, Any] | None = None, method: str = "POST") -> Any:
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self.root + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from None

    def run(self, script: str) -> Any:
        return self.ask("/execute/sync", {"script": script, "args": []})

    def log(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("/se/log", {"type": kind})
        return found

    def pointer(self, *steps: dict[str, Any]) -> None:
        actions = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": list(steps)}
        self.ask("/actions", {"actions": [actions]})

    def open(self, page: Path) -> None:
        self.ask("/url", {"url": page.as_uri()})

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.ask("/screenshot", method="GET")))

    def close(self) -> None:
        self.ask("", method="DELETE")


def move(x: float, y: float) -> dict[str, Any]:
    return {"type": "pointerMove", "duration": 50, "x": round(x), "y": round(y), "origin": "viewport"}


DOWN, UP = {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    long = {"start": "runs/cifar100-podnet-5-s0/snapshots/task-00.safetensors", "base_classes": 40}
    begun = {
        "begun": samples.sample(
            "podnet", "ivt", fall=3.3, ivt={"batchnorm": "recalibrate", "optimizer_state": "reset"}, **long
        )
    }
    runs = load_runs([samples.write(folder / "runs", samples.study() | begun)])
    data = folder / "figures" / "path.json"
    data.parent.mkdir()
    data.write_text(json.dumps(samples.path_data()))
    file = folder / "report.html"
    sections = make_sections(runs, find_study_figures([data.parent]))
    file.write_text(render_html(sections, runs), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    number = free_port()
    log = tmp_path_factory.mktemp("driver") / "log"
    with (
        log.open("wb") as output,
        subprocess.Popen([str(DRIVER), f"--port={number}"], stdout=output, stderr=output) as driver,
    ):
        try:
            for _ in range(100):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{number}/status", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.1)
            yield number
        finally:
            driver.terminate()


@pytest.fixture(scope="module")
def desktop(port: int, page: Path) -> Iterator[Browser]:
    browser = Browser(port, "--window-size=1280,900")
    browser.open(page)
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def phone(port: int, page: Path) -> Iterator[Browser]:
    browser = Browser(port, phone=True)
    browser.open(page)
    yield browser
    browser.close()


def test_page_opens_without_errors_and_without_network(desktop: Browser, phone: Browser) -> None:
    for browser in (desktop, phone):
        assert [entry["message"] for entry in browser.log("browser")] == []
        events = [json.loads(entry["message"])["message"] for entry in browser.log("performance")]
        asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
        assert sum(url.startswith("file:") for url in asked) == 1  # the page, and nothing beside it
    figures = desktop.run("return document.querySelectorAll('figure').length")
    assert figures > 8
    assert desktop.run("return document.querySelectorAll('.plot svg path, .plot svg rect').length") > 100


def column(browser: Browser, table: str, place: int) -> list[str]:
    cells = f"#{table} tbody tr:not(.not-run) td:nth-child({place + 1})"
    found: list[str] = browser.run(f"return [...document.querySelectorAll('{cells}')].map((c) => c.textContent)")
    return found


def test_table_sorts_on_click(desktop: Browser) -> None:
    before = column(desktop, "cifar100-all", 5)
    values = [float(text.split()[0]) for text in before]
    assert values != sorted(values)
    head = "document.querySelectorAll('#cifar100-all thead tr:last-child button')[5]"
    where = f"const b = {head}; b.scrollIntoView({{block: 'center', behavior: 'instant'}});"
    box = desktop.run(f"{where} const r = b.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]")
    desktop.pointer(move(*box), DOWN, UP)
    assert [float(text.split()[0]) for text in column(desktop, "cifar100-all", 5)] == sorted(values)
    desktop.pointer(move(*box), DOWN, UP)
    assert [float(text.split()[0]) for text in column(desktop, "cifar100-all", 5)] == sorted(values, reverse=True)
    assert desktop.run(f"return {head}.parentNode.ariaSort") == "descending"


def test_rows_without_a_number_sort_last(desktop: Browser) -> None:
    head = "document.querySelectorAll('#cifar100-all thead tr:last-child button')[6]"
    for _ in range(2):
        desktop.run(f"{head}.click()")
        assert column(desktop, "cifar100-all", 6)[-1] == "–"  # joint training has no FM


def test_rows_without_runs_are_shown_on_request(desktop: Browser) -> None:
    count = "return [...document.querySelectorAll('#cifar100-5-paper tbody tr')].filter((r) => r.offsetHeight).length"
    few = desktop.run(count)
    desktop.run("document.querySelector('#cifar100-5-paper .filter input').click()")
    assert desktop.run(count) > few > 0
    desktop.run("document.querySelector('#cifar100-5-paper .filter input').click()")


def spot(browser: Browser, figure: str, mark: str, number: int) -> list[float]:
    """The middle of a figure's mark on the screen."""
    found: list[float] = browser.run(
        f"const f = document.getElementById('{figure}');"
        "f.scrollIntoView({block: 'center', behavior: 'instant'});"
        f"const r = f.querySelectorAll('.plot g {mark}')[{number}].getBoundingClientRect();"
        "return [r.x + r.width / 2, r.y + r.height / 2]"
    )
    return found


def tip(browser: Browser, figure: str) -> str | None:
    script = f"const t = document.querySelector('#{figure} .tip'); return t.hidden ? null : t.textContent"
    found: str | None = browser.run(script)
    return found


@pytest.mark.parametrize("kind", ["lines", "bars", "heat"])
def test_plot_shows_a_value_on_hover(desktop: Browser, kind: str) -> None:
    seeds = [samples.sample(seed=seed)["metrics"]["a"] for seed in range(3)]
    mean = sum(a[1] for a in seeds) / 3
    first = sum(samples.sample(seed=seed)["accuracy"][1][0] for seed in range(3)) / 3
    last = samples.sample("podnet", "eopc", fall=3.6)["metrics"]["LA"]
    figure, mark, number, expected = {
        "lines": (HOVER, "path[transform]", 1, ["PODNet", f"after task 2: {mean:.2f} %", "3 seeds"]),
        "bars": ("cifar100-5-last", "rect", 3, [f"{last:.2f}", "one seed", "paper 55.69"]),
        "heat": ("cifar100-5-podnet-matrix-1", "rect", 1, [f"after task 2, on task 1: {first:.2f} %"]),
    }[kind]
    assert tip(desktop, figure) is None
    desktop.pointer(move(*spot(desktop, figure, mark, number)))
    shown = tip(desktop, figure)
    assert shown is not None
    for text in expected:
        assert text in shown
    desktop.pointer(move(2, 2))
    assert tip(desktop, figure) is None


def test_plot_zooms_by_dragging_and_resets(desktop: Browser) -> None:
    labels = f"return [...document.querySelectorAll('#{HOVER} .plot > svg > text')].map((t) => t.textContent)"
    before = desktop.run(labels)
    box = desktop.run(
        f"const f = document.getElementById('{HOVER}'); f.scrollIntoView({{block: 'center', behavior: 'instant'}});"
        "const r = f.querySelector('.plot svg').getBoundingClientRect(); return [r.x, r.y, r.width, r.height]"
    )
    at = [(box[0] + box[2] * part, box[1] + box[3] * part) for part in (0.3, 0.6)]
    desktop.pointer(move(*at[0]), DOWN, move(*at[1]), UP)
    zoomed = desktop.run(labels)
    assert zoomed != before
    assert "6" not in zoomed  # the last task is out of sight
    desktop.run(f"document.querySelector('#{HOVER} .tools button:last-child').click()")
    assert desktop.run(labels) == before
    desktop.run(f"document.querySelector('#{HOVER} .tools button').click()")
    assert desktop.run(labels) != before
    desktop.run(f"document.querySelector('#{HOVER} .plot svg').dispatchEvent(new MouseEvent('dblclick'))")
    assert desktop.run(labels) == before


def test_theme_switches(desktop: Browser) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = desktop.run(ground)
    desktop.run("document.getElementById('theme').click()")
    assert desktop.run(ground) != light
    desktop.run("document.getElementById('theme').click()")
    assert desktop.run(ground) == light


OUTSIDE = """
const wide = document.documentElement.clientWidth, found = [];
if (document.documentElement.scrollWidth > wide) found.push(`the page is ${document.documentElement.scrollWidth} wide`);
for (const node of document.querySelectorAll('body *')) {
  const text = (node.textContent || '').trim().slice(0, 40), box = node.getBoundingClientRect();
  if (!text || !box.width || node.closest('script') || node.closest('.scroll table')) continue;
  if (box.left < -0.5 || box.right > wide + 0.5) found.push(`${node.tagName} ${text}: ${box.left} to ${box.right}`);
  if (node.tagName === 'text') {
    const plot = node.ownerSVGElement.getBoundingClientRect();
    if (box.left < plot.left - 1 || box.right > plot.right + 1 || box.top < plot.top - 1 || box.bottom > plot.bottom + 1)
      found.push(`outside its plot: ${text}`);
  } else if (!(node instanceof SVGElement) && !node.matches('.scroll') && node.scrollWidth > node.clientWidth + 1 && node.clientWidth)
    found.push(`too much text: ${node.tagName} ${text}`);
}
return [wide, found];
"""  # noqa: E501


def test_no_text_overflows_on_a_phone(phone: Browser) -> None:
    wide, found = phone.run(OUTSIDE)
    assert wide == 400
    assert found == []
    scrolling = phone.run("return [...document.querySelectorAll('.scroll')].map((s) => getComputedStyle(s).overflowX)")
    assert set(scrolling) == {"auto"}  # wide tables scroll inside their frame


def test_labels_of_a_chart_do_not_overlap(desktop: Browser, phone: Browser) -> None:
    script = """
    const clash = [];
    for (const plot of document.querySelectorAll('.plot > svg')) {
      const boxes = [...plot.querySelectorAll('text')].map((t) => [t.textContent, t.getBoundingClientRect()]);
      boxes.forEach(([a, p], k) => boxes.slice(k + 1).forEach(([b, q]) => {
        if (p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 3 && q.top < p.bottom - 3)
          clash.push(`${a} / ${b} in ${plot.ariaLabel}`);
      }));
    }
    return clash"""
    for browser in (desktop, phone):
        assert browser.run(script) == []


def test_first_columns_leave_space_for_the_others(desktop: Browser, phone: Browser) -> None:
    widths = """
    return [...document.querySelectorAll('.table')].map((t) => [
      t.id, t.querySelector('.scroll').clientWidth, t.querySelector('table').offsetWidth,
      Math.max(...[...t.querySelectorAll('tbody td:first-child')].map((c) => c.offsetWidth)),
    ])"""
    assert [row[0] for row in phone.run(widths) if row[3] > 0.45 * row[1]] == []
    wide = {row[0] for row in desktop.run(widths) if row[2] > row[1]}
    assert wide <= {"how", "records"}  # commands and files
