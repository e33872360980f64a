"""Reads the documentation site from files in headless Chromium; prints what it saw as JSON.

python site.py CHROMIUM FOLDER WORDS TITLE [WORDS]...
"""

import json
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright


def main(chromium: str, folder: str, words: str, title: str, *others: str) -> None:
    """Open the first page, search for `words`, and open the result that names `title`.

    Before, note the results for the `others`. Then look at the table of settings on a phone.
    """
    messages: list[str] = []
    schemes: set[str] = set()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("console", lambda message: messages.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: messages.append(f"error: {error}"))
        page.on("request", lambda request: schemes.add(request.url.split(":")[0]))
        results: dict[str, list[str]] = {}
        for each in others:
            page.goto((Path(folder) / "index.html").as_uri())
            page.wait_for_load_state("load")
            page.keyboard.press("/")
            page.keyboard.type(each)
            page.get_by_role("option").first.wait_for()
            results[each] = page.get_by_role("option").all_inner_texts()
        page.goto((Path(folder) / "index.html").as_uri())
        page.wait_for_load_state("load")
        page.keyboard.press("/")
        page.keyboard.type(words)
        result = page.get_by_role("option").filter(has_text=title).first
        result.wait_for()
        found = result.inner_text()
        result.click()
        page.wait_for_url("**/decisions/**")
        opened = page.locator("h1").inner_text()
        page.set_viewport_size({"width": 390, "height": 800})
        page.goto((Path(folder) / "docs" / "settings.html").as_uri())
        names = page.locator("td:first-child code")
        broken = names.evaluate_all(
            "all => all.filter(one => one.getClientRects().length > 1).map(one => one.innerText)"
        )
        overflow = page.evaluate("document.documentElement.scrollWidth > innerWidth")
        seen = {"names": names.count(), "broken": broken, "overflow": overflow}
        seen["results"] = results
        browser.close()
    seen |= {"found": found, "opened": opened, "messages": messages, "schemes": sorted(schemes)}
    print(json.dumps(seen))


main(*sys.argv[1:])
