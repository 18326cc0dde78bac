"""Pictures of a report for the docs: python tests/screenshots.py REPORT.html docs/images."""

import sys
from pathlib import Path

from PIL import Image
from selenium.webdriver.support.ui import WebDriverWait

from browser import open_browser, resize

SIZES = {"report-desktop": (1200, 1500, False), "report-phone": (390, 844, True)}
ALL_DRAWN = "return document.querySelectorAll('.chart[data-drawn]').length > 0"


def main(page: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with open_browser() as driver:
        for name, (width, height, dark) in SIZES.items():
            resize(driver, width, height, dark)
            driver.get(page.resolve().as_uri())
            WebDriverWait(driver, 30).until(lambda d: d.execute_script(ALL_DRAWN))
            driver.execute_script("document.documentElement.style.scrollbarWidth = 'none'")
            if width < 500:
                driver.execute_script("document.querySelector('figure').scrollIntoView()")
            path = out / f"{name}.png"
            driver.save_screenshot(str(path))
            Image.open(path).convert("P", palette=Image.Palette.ADAPTIVE).save(path, optimize=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
