"""What every module is, those of modules/ and of attention/: bases, options, weights, what a checkpoint holds."""
