"""Remove channels from an exported ONNX graph."""
