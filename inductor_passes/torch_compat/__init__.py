"""The torch-internal names that the passes and the frontend use, by subject.

Each name here exists under the same name with every supported torch; what differs between versions is settled in this
package. A name that only one module is about is imported by that module: the backend registers with Dynamo, the
rehearsal makes process groups.
"""

import torch

from inductor_passes.torch_compat.version import check_version

check_version(torch.__version__)
