from typing import Any
class Kernels:
    def __init__(self, device: str) -> None:
        self.device = device
    def scratch(self, func: Any, args: Any, out: Any) -> int:
        return 0
    def output_bytes(self, func: Any, args: Any, position: int) -> int | None:
        return None
    def sums_gradients(self, func: Any, args: Any) -> bool:
        return str(func) == "aten.add.Tensor" and len(args) == 2 and args[0].shape == getattr(args[1], "shape", None)
