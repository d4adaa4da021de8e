"""Budgets: files of 400 lines (500 at most), functions of at most 80 with a median of a dozen, names of classes."""

from __future__ import annotations

import ast
import statistics
import sys
from pathlib import Path

AIM, STOP, LONGEST, MEDIAN = 400, 500, 80, 12.0


def main() -> int:
    sizes: list[int] = []
    faults: list[str] = []
    classes: dict[str, Path] = {}
    for path in sorted(Path("src").rglob("*.py")):
        if path.name.endswith("_pb2.py"):  # generated
            continue
        text = path.read_text()
        lines = text.count("\n")
        if lines > STOP:
            faults.append(f"{path}: {lines} lines, at most {STOP}")
        elif lines > AIM:
            print(f"{path}: {lines} lines, aim for {AIM}", file=sys.stderr)
        parsed = ast.parse(text)
        # Launchers are copied alone into the tree of a backend: they are programs of their own.
        for one in parsed.body if "launchers" not in path.parts else ():
            if isinstance(one, ast.ClassDef) and not one.name.startswith("_"):
                if one.name in classes:
                    faults.append(f"{path}:{one.lineno}: {one.name} is a class of {classes[one.name]} too")
                classes[one.name] = path
        for node in ast.walk(parsed):
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
