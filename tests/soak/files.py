"""Files of plans, profiles and reports, broken in any way: an error that names the file, or an object."""

import logging
import tempfile
import traceback
from pathlib import Path
from typing import Any

from tests.simplefsdp.cli.test_broken_files import READERS, check_reader


def campaign(count: int) -> dict[str, Any]:
    """Break each kind of file in ``count`` ways; return how many were refused, and the first that was not handled."""
    logging.getLogger("simplefsdp").setLevel(logging.ERROR)  # most files differ from their hash
    figures: dict[str, Any] = {"runs": count * len(READERS), "readers": len(READERS), "failures": []}
    for name, load in READERS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                refused = check_reader(Path(folder), name, load, count)
            except Exception:
                figures["failures"].append(traceback.format_exc()[-3000:])
            else:
                figures[f"refused, {name} by {load.__qualname__.strip('_')}"] = refused
    return figures
