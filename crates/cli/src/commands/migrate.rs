//! `airtight migrate`: creates or upgrades the tables, or prints SQL.

use airtight::{postgres::Grantee, table::Shape};
use serde_json::json;

use crate::{
    args::{GranteeArg, MigrateArgs, ShapeArg},
    errors::Outcome,
    output::{self, counted},
    wiring::Target,
};

pub(crate) async fn run(args: &MigrateArgs) -> Outcome {
    let mut target = Target::from_args(&args.database)?;
    if args.notify || args.no_notify {
        target.set_notify(args.notify)?;
    }
    match args.shape {
        Some(ShapeArg::Queue) => target.set_shape(Shape::Queue)?,
        Some(ShapeArg::Log) => target.set_shape(Shape::Log)?,
        None => {}
    }
    if args.print {
        let sql = target.migration_sql();
        return output::line(sql.trim_end());
    }
    if let Some(to) = args.print_grants {
        let to = grantee(to);
        let sql = target.grants_sql(to, args.role.as_deref().unwrap_or(to.as_str())).await?;
        return output::line(sql.trim_end());
    }
    let store = target.create().await?;
    let mut steps = store.admin().migrate().await?;
    match store.make_partitions().await? {
        0 => {}
        made => steps.push(format!("created {} in advance", counted(made, "table partition"))),
    }
    if args.output.json {
        return output::json(&json!({"database": target.url.to_string(), "steps": steps}));
    }
    if steps.is_empty() {
        return output::line(format!("{}: up to date", target.url));
    }
    for step in steps {
        output::line(step)?;
    }
    Ok(())
}

fn grantee(arg: GranteeArg) -> Grantee {
    match arg {
        GranteeArg::Producer => Grantee::Producer,
        GranteeArg::Relay => Grantee::Relay,
        GranteeArg::Consumer => Grantee::Consumer,
        GranteeArg::Cdc => Grantee::Cdc,
        GranteeArg::Viewer => Grantee::Viewer,
    }
}
