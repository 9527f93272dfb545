"""Lightning: the strategies and the callback. Thin; everything they do is in the engine they carry."""
