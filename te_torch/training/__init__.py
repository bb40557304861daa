"""What training needs around the modules."""
