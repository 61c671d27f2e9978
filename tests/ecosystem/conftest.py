"""The programs are imported by the tests, which are skipped where their libraries are missing; they have no
doctests.
"""

collect_ignore = ["brain_programs.py", "created_programs.py"]
