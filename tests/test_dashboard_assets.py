"""The dashboard's page as text: joined modules, nothing foreign executed, nothing fetched, vendored files unchanged."""

import base64
import configparser
import gzip
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from schedsearch.dashboard import assets

ROOT = Path(__file__).resolve().parent.parent
STATIC = ROOT / "schedsearch" / "dashboard" / "static"
BOOT = {"version": "1.2.3"}


def modules() -> list[Path]:
    return sorted((STATIC / "js").glob("*.js"))


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes modules into a static folder of their own and joins them."""
    assets.joined_modules.cache_clear()
    monkeypatch.setattr(assets, "STATIC", tmp_path)
    (tmp_path / "js").mkdir()

    def join(**texts: str) -> str:
        for name, text in texts.items():
            (tmp_path / "js" / f"{name}.js").write_text(text, encoding="utf-8")
        return assets.joined_modules()

    yield join
    assets.joined_modules.cache_clear()


def test_modules_are_joined_in_the_order_in_which_they_need_one_another(written):
    joined = written(
        app='import { b } from "./beta.js";\nimport { a } from "./alpha.js";\nb(a);\n',
        beta='import { a } from "./alpha.js";\nexport function b() { return a; }\n',
        alpha="export const a = 1;\n",
    )
    assert joined == ("// alpha.js\nconst a = 1;\n\n// beta.js\nfunction b() { return a; }\n\n// app.js\nb(a);\n")


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ({"app": 'import { a } from "./b.js";\n', "b": "export const c = 1;\n"}, "imports a, which b.js does not export"),
        (
            {"app": 'import { a } from "./b.js";\nconst c = 1;\n', "b": "const c = 2;\nexport const a = c;\n"},
            "c is declared by both",
        ),
        (
            {"app": 'import { a } from "./b.js";\n', "b": 'import { x } from "./app.js";\nexport const a = 1;\n'},
            "in a circle",
        ),
        ({"app": 'import * as all from "./b.js";\n', "b": ""}, "cannot join"),
        ({"app": "export default 1;\n"}, "cannot join"),
    ],
)
def test_modules_that_cannot_be_joined_are_named(written, texts, words):
    with pytest.raises(ValueError, match=words):
        written(**texts)


def test_every_module_is_part_of_the_page():
    joined = assets.joined_modules()
    assert [path.name for path in modules() if f"// {path.name}\n" not in joined] == []


FORBIDDEN = (
    r"innerHTML|outerHTML|insertAdjacentHTML|\beval\b|new Function|document\.write|DOMParser|setHTML|srcdoc|javascript:"
)


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.name)
def test_modules_make_no_markup_and_no_script_from_text(path):
    assert re.findall(FORBIDDEN, path.read_text(encoding="utf-8")) == []


def test_modules_refer_to_no_other_host():
    for path in [*modules(), STATIC / "app.css", STATIC / "index.html"]:
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s'\"`]*", path.read_text(encoding="utf-8")))
        # the namespace of SVG is a name, not an address that a browser asks for
        assert {address for address in addresses if "www.w3.org/2000/svg" not in address} <= set(), path.name


def test_the_vendored_files_have_their_checksums():
    folder = STATIC / "vendor"
    lines = (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    expected = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    assert {path.name for path in folder.iterdir()} == {*expected, "SHA256SUMS"}
    assert {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in expected} == expected


def test_the_vendored_charts_are_of_a_release_without_the_known_hole():
    banner = (STATIC / "vendor" / "echarts.min.js").read_text(encoding="utf-8")[:200]
    version = re.search(r"Apache ECharts (\d+)\.(\d+)", banner)
    assert version and (int(version[1]), int(version[2])) >= (6, 1)


def test_all_files_of_the_page_are_package_data():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    patterns = [pattern.strip() for pattern in setup["options.package_data"]["schedsearch"].split(",")]
    package = ROOT / "schedsearch"
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    assert {path for path in STATIC.rglob("*") if path.is_file()} <= packed


def test_json_in_the_page_cannot_end_its_element():
    value = {"<b>": "</script><!--", "text": "a & b > c \u2028"}
    text = assets.inline_json(value)
    assert not set("<>&") & set(text)
    assert json.loads(text) == value


def test_a_report_holds_its_answers_and_names_no_policy_hole():
    answers = {"overview": {"name": "</script><img onerror=x>"}, "task/0.1": {}}
    page = assets.report_page(answers, "n0nce", BOOT)
    packed = re.search(r'<script type="text/plain" id="data">(.*?)</script>', page)
    assert packed and json.loads(gzip.decompress(base64.b64decode(packed[1]))) == answers
    assert page.count("</script>") == page.count("<script") == 4
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy and "unsafe" not in policy[1] and "connect-src 'none'" in policy[1]
    assert "style=" not in page.split("<body>")[1].split("<script")[0]


def test_a_report_refuses_numbers_that_json_does_not_have():
    with pytest.raises(ValueError, match="not JSON compliant"):
        assets.report_page({"overview": float("nan")}, "n", BOOT)


def test_the_live_page_holds_no_data_and_has_its_policy_in_the_header():
    page = assets.live_page("n0nce", BOOT)
    assert '<script type="text/plain" id="data"></script>' in page
    assert '"live":true' in page and "http-equiv" not in page
    assert "connect-src 'self'" in assets.content_security_policy("n0nce", live=True)
    assert page.count('nonce="n0nce"') == 3


@pytest.mark.parametrize("nonce", ["", "a b", '"><script>', "a'; script-src *"])
def test_a_nonce_with_other_characters_is_refused(nonce):
    with pytest.raises(ValueError, match="nonce"):
        assets.live_page(nonce, BOOT)


def test_the_functions_of_the_modules_pass_their_own_tests():
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed; it runs the tests of tests/browser/js")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.lstrip("v").split(".")[0]) < 20:
        pytest.skip(f"node {version.strip()} has no test runner; 20 or newer is needed")
    files = sorted(str(path) for path in (ROOT / "tests" / "browser" / "js").glob("*.test.mjs"))
    assert files
    done = subprocess.run([node, "--test", *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
