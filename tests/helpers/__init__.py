"""What several test files share. Import from here: `from tests.helpers import RunIf, seed_everything`."""

from tests.helpers.runif import RunIf
from tests.helpers.seed import seed_everything
from tests.helpers.state import difference, restore, snapshot

__all__ = ["RunIf", "difference", "restore", "seed_everything", "snapshot"]
