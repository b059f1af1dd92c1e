"""WHAT a tensor is: dtypes, specs, layouts, refs, catalogs. Values; bytes come from elsewhere."""
