"""Print the line coverage of each room: python tests/coverage_by_room.py, after pytest --cov."""

from collections import Counter
from pathlib import Path

from coverage import Coverage

import rabo

PACKAGE = Path(rabo.__file__).parent


def main() -> None:
    found = Coverage()
    found.load()
    lines: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        _, statements, _, missing, _ = found.analysis2(str(path))
        parts = path.relative_to(PACKAGE).parts
        for room in (parts[0] if len(parts) > 1 else "top level", "all"):
            lines[room] += len(statements)
            missed[room] += len(missing)
    print(f"{'room':<16}{'lines':>8}{'covered':>10}")
    for room in sorted(lines, key=lambda name: (name == "all", name)):
        print(f"{room:<16}{lines[room]:>8}{1 - missed[room] / max(1, lines[room]):>10.1%}")


if __name__ == "__main__":
    main()
