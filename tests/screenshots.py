"""Pictures of a report for the docs: python tests/screenshots.py REPORT.html docs/images."""

import sys
from pathlib import Path

from PIL import Image
from selenium.webdriver.support.ui import WebDriverWait

from browser import open_browser, resize

# width, height, whether it is dark, and what is at the top
VIEWS = {
    "report-desktop": (1200, 1500, False, "body"),
    "report-run": (1200, 1500, False, "details.run:last-of-type"),
    "report-phone": (390, 844, True, "figure"),
}
ALL_DRAWN = (
    "return [...document.querySelectorAll('.chart')].every((n) => n.querySelector('.main-svg'))"
)


def main(page: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with open_browser() as driver:
        for name, (width, height, dark, top) in VIEWS.items():
            resize(driver, width, height, dark)
            driver.get(page.resolve().as_uri())
            WebDriverWait(driver, 30).until(lambda d: d.execute_script(ALL_DRAWN))
            driver.execute_script("document.documentElement.style.scrollbarWidth = 'none'")
            driver.execute_script("document.querySelector(arguments[0]).scrollIntoView()", top)
            path = out / f"{name}.png"
            driver.save_screenshot(str(path))
            Image.open(path).convert("P", palette=Image.Palette.ADAPTIVE).save(path, optimize=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
