"""The candidates table: schema, filters and order; Parquet, TREC and raw files. No tokens."""
