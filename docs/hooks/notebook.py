"""Every notebook in docs/ as a page, with the outputs it was committed with."""

import json
from pathlib import Path

from mkdocs.structure.files import File


def on_files(files, config):
    for path in sorted(Path(config.docs_dir).glob("*.ipynb")):
        page = as_markdown(json.loads(path.read_text()))
        files.append(File.generated(config, f"{path.stem}.md", content=page))
    return files


def as_markdown(notebook):
    return "\n\n".join(part for cell in notebook["cells"] for part in parts(cell))


def parts(cell):
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield text
        return
    yield f"```python\n{text}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {"text/plain": output.get("text", "")})
        if "image/png" in data:
            picture = "".join(data["image/png"]).strip()
            yield f'<img alt="output" src="data:image/png;base64,{picture}">'
        else:
            yield f"```text\n{''.join(data['text/plain']).rstrip()}\n```"
