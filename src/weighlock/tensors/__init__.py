"""WHAT a tensor is: dtypes, specs, layouts, refs, catalogs. Values only; bytes come from elsewhere."""
