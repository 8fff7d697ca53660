"""Studies: many runs kept in a folder (`runs`), and the paper's experiments made of them (`paper`)."""
