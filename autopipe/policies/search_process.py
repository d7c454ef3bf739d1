"""The process of `ProcessSearcher`: reads problems, a JSON object a line, answers with results, ends with its input."""

from __future__ import annotations

import os
import sys

from autopipe.policies.plan_search import SearchProblem, search_plan


def main() -> None:
    os.nice(19)
    for line in sys.stdin:
        result = search_plan(SearchProblem.model_validate_json(line))
        sys.stdout.write(result.model_dump_json() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
