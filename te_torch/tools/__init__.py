"""What looks at a whole model: reports, and the conversion of one."""
