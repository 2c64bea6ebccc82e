"""The candidates table: schema, validation, filters, order; Parquet, TREC and raw files. Imports no other package."""
