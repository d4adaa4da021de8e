"""Size budgets: files under 400 lines (hard stop 500), functions at most 80 with a median of a dozen."""

from __future__ import annotations

import ast
import statistics
import sys
from pathlib import Path

AIM, STOP, LONGEST, MEDIAN = 400, 500, 80, 12.0


def main() -> int:
    sizes: list[int] = []
    faults: list[str] = []
    for path in sorted(Path("src").rglob("*.py")):
        if path.name.endswith("_pb2.py"):  # generated
            continue
        text = path.read_text()
        lines = text.count("\n")
        if lines > STOP:
            faults.append(f"{path}: {lines} lines, at most {STOP}")
        elif lines > AIM:
            print(f"{path}: {lines} lines, aim for {AIM}", file=sys.stderr)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                # A migration is a list, and as long as what it lists.
                if "migrations" not in path.parts:
                    sizes.append(size)
                    if size > LONGEST:
                        faults.append(f"{path}:{node.lineno}: {node.name} has {size} lines, at most {LONGEST}")
    median = statistics.median(sizes)
    if median > MEDIAN:
        faults.append(f"the median function has {median} lines, at most {MEDIAN}")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
