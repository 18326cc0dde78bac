"""Pages of the repository that lie outside docs/, and links between the two.

A link is written as it works in the repository; in the site, docs/ is the root.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "results/*/README.md",
    "results/*/*.png",
    "results/*/*.svg",
    "results/*/runs.jsonl",
    "results/*/sweep.json",
    "results/step-sizes/*.json",
    "results/coverage/*.json",
    "results/multiply-adds/*.json",
)
LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_files(files, config):
    for path in sorted(path for pattern in OUTSIDE for path in ROOT.glob(pattern)):
        name = path.relative_to(ROOT)
        if name.suffix != ".json" or (ROOT / "results" / name.parts[1] / "README.md").exists():
            files.append(File.generated(config, name.as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    return relink(markdown, page.file.src_uri)


def relink(markdown, page):
    """Point links at the places that files have in the site."""
    is_outside = any(Path(page).match(pattern) for pattern in OUTSIDE)
    folder = posixpath.dirname(page if is_outside else f"docs/{page}")

    def moved(link):
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        in_site = target.removeprefix("docs/")
        return f"]({posixpath.relpath(in_site, posixpath.dirname(page) or '.')}{link[2] or ''})"

    return LINK.sub(moved, markdown)
