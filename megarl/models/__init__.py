"""Model families as data: shapes from config.json, the names of their parameters, and the files they are stored in."""
