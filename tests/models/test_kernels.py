"""The Triton kernels on a CUDA card. Without one they run in the interpreter: test_kernels_interpreted.py."""

from __future__ import annotations

import pytest

from tests.models.kernel_cases import *  # noqa: F403
from tests.models.sampling_cases import *  # noqa: F403
from tests.models.step_rows_cases import *  # noqa: F403
from tests.models.sum_norm_cases import *  # noqa: F403

pytestmark = pytest.mark.gpu
