import base64
import gzip
import json
import re
from html.parser import HTMLParser

from grpo_rl import cli
from grpo_rl.report.page import SECTIONS, Section, assemble, build, write_report
from tests.report.runs import make_run, unpacked

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)> {{ 7 * 7 }}"


class Page(HTMLParser):
    """The elements, attributes and data of a page, as a browser's parser sees them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.ids, self.data = [], [], [], {}
        self._words, self._script = [], None
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        given = dict(attrs)
        self._script = given.get("data-section", "") if tag == "script" else None

    def handle_data(self, data):
        if self._script:
            self.data[self._script] = json.loads(gzip.decompress(base64.b64decode(data, validate=True)))
        elif self._script is None:
            self._words.append(data)

    def handle_endtag(self, tag):
        self._script = None

    @property
    def text(self) -> str:
        return " ".join(" ".join(self._words).split())


def test_a_whole_run_is_reported_on_one_page_that_refers_to_nothing_outside_itself(tmp_path):
    html = write_report(make_run(tmp_path)).read_text(encoding="utf-8")
    page = Page(html)
    assert "SmolLM2-135M-Instruct trained with GRPO on gsm8k" in page.text
    assert "Held-out reward rose from 0.412 to 1.508: a gain of +1.096, 95 % interval +0.957 to +1.229." in page.text
    drawn = {chart["title"]: chart["group"] for chart in page.data["charts"]["charts"]}
    shown = list(drawn)
    assert shown[:2] == ["Reward", "Held-out reward"] and len(page.data["charts"]["charts"]) == len(shown) == 42
    assert drawn["Gradient norm"] == "Policy" and drawn["Reward parts"] == "Unchanged"
    assert {"Distribution of correctness", "KL divergence", "Step time", "Memory"} < set(shown)
    assert page.data["configuration"]["overrides"] == ["+experiment=quickstart", "optimizer.lr=5e-5"]
    assert ["train.optim_batch_size", "32"] in page.data["configuration"]["settings"]
    assert ["torch", "2.13.0+cpu"] in page.data["configuration"]["versions"]
    steps = next(tile for tile in page.data["summary"]["tiles"] if tile["label"] == "Steps")
    assert steps == {"label": "Steps", "value": "40", "detail": "in 9:01", "tone": ""}

    assert not {"img", "iframe", "image", "object"} & set(page.tags)
    targets = [value for name, value in page.attributes if name in ("src", "href", "xlink:href", "data", "action")]
    assert targets and all(target.startswith(("#", "data:,")) for target in targets)
    assert "url(" not in html and "connect-src" not in html
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1].replace("&#39;", "'")
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    assert "connect-src &#39;self&#39;" in assemble(SECTIONS, build(SECTIONS, tmp_path), live=True)
    assert len(html) < 400_000
    assert len(page.ids) == len(set(page.ids))


def test_no_text_of_a_run_can_end_the_script_that_holds_it(tmp_path):
    make_run(tmp_path, steps=2)
    (tmp_path / "config.yaml").write_text(json.dumps({"model": {"name": HOSTILE}, "note": HOSTILE}))
    html = write_report(tmp_path).read_text()
    page = Page(html)
    assert page.data["configuration"]["settings"] == [["model.name", HOSTILE], ["note", HOSTILE]]
    scripts = [tag for tag in page.tags if tag == "script"]
    assert len(scripts) == len(page.data) + 1 and "img" not in page.tags
    assert not any(name.startswith("on") for name, _ in page.attributes)


def test_a_section_that_cannot_be_read_says_so_and_leaves_the_others(tmp_path):
    def broken(_):
        raise ValueError("part-7 can't be read")

    make_run(tmp_path, steps=1)
    found = build([Section("broken", "Broken", broken), *SECTIONS], tmp_path)
    assert json.loads(found["broken"]) == {"left_out": "part-7 can't be read"}
    assert {"summary", "charts", "configuration"} <= set(found)
    found = build([Section("broken", "Broken", lambda _: {}["lost"])], tmp_path)
    assert json.loads(found["broken"])["left_out"].startswith("KeyError: 'lost' (a defect")


def test_no_secret_of_config_or_overrides_is_on_the_page(tmp_path):
    make_run(tmp_path, steps=1)
    config = {
        "model": {"name": "m", "mirror": "https://me:hunter2@host/x"},
        "logger": {"settings": {"api_key": "hunter2", "password": "hunter2"}},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    (tmp_path / "overrides.yaml").write_text("- +logger.settings.api_key=hunter2\n- x={password: hunter2}\n")
    html = unpacked(write_report(tmp_path))
    assert "hunter2" not in html and "logger.settings.api_key=***" in html and "https://***@host/x" in html


def test_the_command_writes_the_page_of_a_run_and_takes_either_runs_or_the_demo(tmp_path, capsys):
    run = make_run(tmp_path / "run", steps=1)
    assert cli.main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html") and (run / "report.html").exists()
    assert cli.main(["report"]) == 2 and cli.main(["report", str(run), "--demo"]) == 2
