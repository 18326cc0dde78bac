"""The paper's tables and figures, studies beyond them, and the paper's theory.

These are tools of this repository and not part of the wheel: `python -m experiments NAME`.
"""
