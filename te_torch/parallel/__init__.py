"""Work that is spread over ranks: what the core's layers ask of torch.distributed."""
