"""The page in a real browser: headless Chromium, driven by its own driver over plain HTTP."""

from __future__ import annotations

import base64
import csv
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from incvec.study.page import make_sections, render_html
from incvec.study.page_figures import find_study_figures
from incvec.study.runs import load_runs
from tests.study import samples

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NEEDED = "needs Debian's packages chromium and chromium-driver: apt-get install chromium chromium-driver"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=NEEDED)]
HOVER = "cifar100-5-podnet-accuracy"
PATH = "study-figures-path-accuracy-old"
FORMAT_1 = Path(__file__).parent / "figures_format_1"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Browser:
    """The part of WebDriver that these tests need."""

    def __init__(self, port: int, *arguments: str, phone: bool = False, downloads: Path | None = None) -> None:
        self.root = f"http://127.0.0.1:{port}/session"
        options: dict[str, Any] = {
            "binary": CHROMIUM,
            # No name resolves: a request to any host fails and appears in the log.
            "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                     "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND", *arguments],
        }  # fmt: skip
        if downloads is not None:
            options["prefs"] = {
                "download.default_directory": str(downloads),
                "profile.default_content_setting_values.automatic_downloads": 1,
            }
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

    def screenshot(self, file: Path) -> Any:
        """The window as a file, and as an array of pixels."""
        file.write_bytes(base64.b64decode(self.ask("/screenshot", method="GET")))
        return imread(file)

    @contextmanager
    def dark(self) -> Iterator[None]:
        """The dark theme, within the context."""
        self.run("document.getElementById('theme').click()")
        try:
            yield
        finally:
            self.run("document.getElementById('theme').click()")

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
    begun |= {f"detailed-{s}": samples.detailed(samples.sample("lucir", "ivt", seed=s, tasks=10)) for s in (0, 1)}
    begun["detailed"] = samples.detailed(samples.sample("lucir", tasks=10))
    begun["detailed"]["class_names"] = [f"a bird of long name and class {k}" for k in range(6)]
    runs = load_runs([samples.write(folder / "runs", samples.study() | begun)])
    data = folder / "figures" / "path.json"
    data.parent.mkdir()
    paths = samples.path_data()
    paths["curves"] += [{**paths["curves"][1], "name": f"PODNet + IVT, seed {seed}"} for seed in range(1, 8)]
    data.write_text(json.dumps(paths))
    for kind in ("tradeoff", "plane", "curvature", "gap"):
        shutil.copy(FORMAT_1 / f"{kind}.json", data.parent)
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
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def desktop(port: int, page: Path, downloads: Path) -> Iterator[Browser]:
    browser = Browser(port, "--window-size=1280,900", downloads=downloads)
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
    desktop.run(f"document.querySelector('#{HOVER} .tools [aria-label=\"show all\"]').click()")
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


CONTRAST = """
const parse = (text) => { const m = text.match(/[\\d.]+/g).map(Number); return [m[0], m[1], m[2], m[3] ?? 1]; };
const light = (c) => { const [r, g, b] = c.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const ratio = (a, b) => { const [x, y] = [light(a.slice(0, 3)), light(b.slice(0, 3))].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
const ground = (node) => {
  for (let at = node; at; at = at.parentElement) {
    const color = parse(getComputedStyle(at).backgroundColor);
    if (color[3] === 1) return color;
  }
};
const low = new Set(); let seen = 0;
for (const node of document.querySelectorAll('body *')) {
  const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
  if (!own || node.closest('script, [hidden]') || !node.getClientRects().length) continue;
  const style = getComputedStyle(node), svg = node.tagName === 'text';
  const cell = svg && node.previousElementSibling?.tagName === 'rect' && node.closest('[clip-path]') && node.previousElementSibling;
  const under = cell ? parse(getComputedStyle(cell).fill) : ground(node);
  const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && +style.fontWeight >= 700);
  const got = ratio(parse(svg ? style.fill : style.color), under);
  seen += 1;
  if (got < (large ? 3 : 4.5)) low.add(`${node.tagName} ${node.textContent.trim().slice(0, 30)}: ${got.toFixed(2)}`);
}
for (const node of document.querySelectorAll('.plot g path[fill="none"], .plot g path[transform]')) {
  const got = ratio(parse(getComputedStyle(node).stroke), ground(node));
  if (!node.closest('figure').id.includes('plane') && got < 3) low.add(`a line in ${node.closest('figure').id}: ${got.toFixed(2)}`);
}
return [seen, [...low]];
"""  # noqa: E501


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_page_fits_its_window_and_can_be_read(
    size: str, dark: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """At 1,280 and at 400 pixels, light and dark: nothing is wider than the page, and text and lines have contrast."""
    browser: Browser = request.getfixturevalue(size)
    with browser.dark() if dark else nullcontext():
        wide, found = browser.run(OUTSIDE)
        assert wide == 400 if size == "phone" else 1200 < wide <= 1280
        assert found == []
        seen, low = browser.run(CONTRAST)
        assert seen > 300
        assert low == []
        for figure in (HOVER, PATH, "study-figures-plane", None):
            place = f"document.getElementById('{figure}').scrollIntoView({{block: 'center', behavior: 'instant'}})"
            browser.run(place if figure else "scrollTo({top: 0, behavior: 'instant'})")
            pixels = browser.screenshot(tmp_path / f"{size}-{figure}.png")[..., :3]
            corner, colors = pixels[4, 4], pixels.reshape(-1, 3)
            assert (corner.mean() < 0.2) == dark
            assert pixels.shape[1] == wide * 2 if size == "phone" else pixels.shape[1] >= wide
            assert 0.02 < (abs(colors - corner).max(1) > 0.2).mean() < 0.75  # neither empty nor covered


def test_wide_tables_scroll_in_their_frame(phone: Browser) -> None:
    scrolling = phone.run("return [...document.querySelectorAll('.scroll')].map((s) => getComputedStyle(s).overflowX)")
    assert set(scrolling) == {"auto"}


def test_path_has_both_axes(desktop: Browser) -> None:
    label = f"return [...document.querySelectorAll('#{PATH} .plot text.title')].map((t) => t.textContent)"
    ticks = f"return [...document.querySelectorAll('#{PATH} .plot > svg > text')].map((t) => t.textContent)"
    press = f'document.querySelector(\'#{PATH} .tools [aria-label^="show "][aria-label$="axis"]\').click()'
    assert desktop.run(label)[1] == "distance from the start (the paper's λ)"
    assert "10" in desktop.run(ticks)
    desktop.run(press)
    assert desktop.run(label)[1] == "share of the way (0: start, 1: end)"
    assert "10" not in desktop.run(ticks)
    assert {"0", "0.4", "1"} <= set(desktop.run(ticks))
    desktop.run(press)
    assert desktop.run(label)[1].startswith("distance")


def test_ten_runs_have_ten_colors(desktop: Browser, phone: Browser) -> None:
    lines = f"[...document.querySelectorAll('#{PATH} .plot g path[fill=none]')]"
    strokes = f"return {lines}.map((p) => getComputedStyle(p).stroke)"
    for browser in (desktop, phone):
        assert len(set(browser.run(strokes))) == 10
        with browser.dark():
            assert len(set(browser.run(strokes))) == 10


def downloaded(folder: Path, name: str) -> bytes:
    for _ in range(100):
        if (folder / name).is_file() and (content := (folder / name).read_bytes()):
            return content
        time.sleep(0.1)
    raise AssertionError(f"{name} did not arrive; there are {[file.name for file in folder.iterdir()]}")


def test_numbers_picture_and_commands_can_be_downloaded(desktop: Browser, downloads: Path) -> None:
    def press(figure: str, text: str) -> None:
        desktop.run(
            f"[...document.querySelectorAll('#{figure} .tools button')].find((b) => b.textContent === '{text}').click()"
        )

    for text in ("CSV", "PNG", "command"):
        press(HOVER, text)
    rows = list(csv.reader(downloaded(downloads, f"{HOVER}.csv").decode().splitlines()))
    assert rows[0] == ["run", "tasks learned", "accuracy on the classes seen, %", "deviation", "seeds"]
    first = next(row for row in rows if row[:2] == ["PODNet", "2"])
    values = [samples.sample(seed=seed)["metrics"]["a"][1] for seed in range(3)]
    assert float(first[2]) == pytest.approx(sum(values) / 3)
    assert first[4] == "3"
    (downloads / "picture.png").write_bytes(downloaded(downloads, f"{HOVER}.png"))
    pixels = imread(downloads / "picture.png")[..., :3]
    assert pixels.shape[1] > 800
    assert len({tuple(color) for color in pixels.reshape(-1, 3)[::7].round(1).tolist()}) > 8  # lines in several colors
    commands = downloaded(downloads, f"{HOVER}-commands.txt").decode().splitlines()
    assert sum("--addon ivt" in command for command in commands) == 3
    press("cifar100-all", "CSV")
    table = list(csv.reader(downloaded(downloads, "cifar100-all.csv").decode().splitlines()))
    assert table[0][:4] == ["run", "changed", "increments", "seeds"]
    assert len(table) > 8


def test_plane_shows_its_models(desktop: Browser) -> None:
    figure = "study-figures-plane"
    data = json.loads((FORMAT_1 / "plane.json").read_text())
    loss = data["marks"][3]["loss"]
    marks = desktop.run(f"return document.querySelectorAll('#{figure} .plot g path[transform]').length")
    assert marks == len(data["marks"])
    desktop.pointer(move(*spot(desktop, figure, "path[transform]", 3)))
    shown = tip(desktop, figure)
    assert shown is not None
    assert f"loss {loss:.2f}, {data['marks'][3]['accuracy']:.1f} %" in shown
    desktop.pointer(move(2, 2))


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
